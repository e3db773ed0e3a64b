"""Whether answers are right: differences judged, samples tested."""
