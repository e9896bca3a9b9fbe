"""Values for layers that are in no model yet, and how many elements each kernel gets."""
