"""Commands of `python -m model_center` that train models and use them."""
