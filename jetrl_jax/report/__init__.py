"""The HTML page about one or several runs."""
