"""Tables, pictures and pages of figures."""
