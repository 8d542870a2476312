"""Import paths of old programs."""
