"""What vLLM's own processes import, with torch: the plugin and everything that it registers."""
