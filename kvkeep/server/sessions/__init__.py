"""Sessions over HTTP: memories that can be fed, written from, edited, forked and kept."""
