"""`asyncspec report`: what a run was like, as one HTML file or as text."""
