"""The automatic node budget: measured step costs, and the switch that turns drafting on and off."""
