"""Who comes back, and when: conversations, their rhythm, and what of them is worth having in VRAM."""
