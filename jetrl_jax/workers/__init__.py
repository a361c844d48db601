"""Worker processes for code that may hang or die."""
