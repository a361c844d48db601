"""The devices of a run: their mesh, the processes that hold them, and GPU memory shared with vLLM."""
