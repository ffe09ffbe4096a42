"""What to bring back before it is asked for, and how much of VRAM and of the link that may cost."""
