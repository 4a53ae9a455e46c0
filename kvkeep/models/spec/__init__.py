"""Model specifications: config.json to `ModelSpec`."""
