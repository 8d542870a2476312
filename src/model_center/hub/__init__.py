"""From names to folders with files: what the project knows, and Hugging Face's hub."""
