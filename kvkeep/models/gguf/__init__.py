"""GGUF files: parsing, and conversion to the Hugging Face layout."""
