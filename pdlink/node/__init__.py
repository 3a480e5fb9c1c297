"""The front door: `Node` opens a worker's end of every link and hands out one object per transfer."""
