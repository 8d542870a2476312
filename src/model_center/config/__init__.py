"""What all configurations of models have in common."""
