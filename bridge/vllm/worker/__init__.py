"""Code for vLLM's own processes, which have torch: the plugin and everything that it registers."""
