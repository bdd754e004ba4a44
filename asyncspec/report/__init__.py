"""`asyncspec report`: show where the time of a run went and what it learned, as one HTML file or as text."""
