"""Values for layers that are in no model yet: closest to old kernels, or to outputs; and how many elements to take."""
