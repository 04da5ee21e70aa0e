"""The compiled side: reading HLO modules, and writing the schedule into them."""
