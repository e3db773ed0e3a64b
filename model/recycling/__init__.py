"""Old import paths of Token Recycling: `model.recycling.tree_template_`."""
