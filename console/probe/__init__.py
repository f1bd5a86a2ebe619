"""What a machine can do, measured: `penstock probe`, and the file it writes.

The command runs each measurement in a child process with a time limit (`device_worker`, `decode_worker`), so that this
process needs no torch; `link_server` and `link_client` measure the network between two machines. Probe files are read
by `penstock plan --inventory` (`console.plan`).
"""
