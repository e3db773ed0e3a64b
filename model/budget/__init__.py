"""What a drafted node costs on this device, and whether drafting pays."""
