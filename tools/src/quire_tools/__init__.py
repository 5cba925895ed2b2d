"""What measures, tunes and draws Quire: the commands `quire bench` and `quire tune`, and what they are made of."""
