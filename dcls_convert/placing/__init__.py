"""New layers: made for a plan, put into the model, and folded into plain convolutions."""
