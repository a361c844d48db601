"""Worker processes for user code that may hang or crash."""
