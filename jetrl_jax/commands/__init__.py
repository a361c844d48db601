"""The commands, one file each; `entry` holds the code they share."""
