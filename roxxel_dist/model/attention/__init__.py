"""Attention by the kernel for the device: of grouped heads or of a latent, in whole and in cut rows."""
