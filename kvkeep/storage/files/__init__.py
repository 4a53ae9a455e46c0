"""Atomic writes of files and folders, text files and safetensors. Imports only `kvkeep.errors`."""
