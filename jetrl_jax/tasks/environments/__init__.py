"""The environments that come with the package, and the base of those whose actions are calls of tools."""
