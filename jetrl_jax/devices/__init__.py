"""The devices of a run: their mesh, the processes that hold them, a GPU's memory shared with vLLM."""
