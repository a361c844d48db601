"""What a run keeps: its directory, checkpoints, metrics, console; and what a resume asks of them."""
