"""What the communication layer costs, what the links do, and how fast codecs are: measured here."""
