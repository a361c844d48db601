"""What one field of the config demands of another."""
