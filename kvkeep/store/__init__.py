"""What is kept on disk: snapshots, sessions, evaluated prefixes."""
