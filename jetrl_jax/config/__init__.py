"""The types of a run's YAML file, one module for each group of sections.

`load` reads a file; `rules` has the rules between sections.
"""
