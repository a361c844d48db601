"""The YAML file of a run as types: one file for each group of sections, `load` reads,
`rules` says what fits.
"""
