"""The YAML file of a run as types, one file a group of sections; `load` reads, `rules` says what fits."""
