"""The block kernel: one program for each row block of a sequence."""
