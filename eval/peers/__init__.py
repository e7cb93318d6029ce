"""Other engines and trainers behind one interface, to measure beside ours."""
