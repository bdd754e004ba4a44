"""Every deadline of the system that is not a field of the configuration (`deployment.*_timeout_s`), in seconds.

Every wait that only another process can end has one of these deadlines. When it passes, the actor's log or the
controller says so in one line that names the process that was waited for.
"""

BEAT_EVERY_S = 0.25  # between two heartbeats of a process, in runs of up to MOST_BEATS * BEAT_EVERY_S actors
MOST_BEATS = 4000  # heartbeats a second of all actors together, as far as LEAST_BEATS allow
LEAST_BEATS = 8  # of each actor in deployment.silent_timeout_s
# Factor on deployment.silent_timeout_s for a process that is still loading, and on deployment.start_timeout_s for a
# process that waits for others to start.
LOADING_PATIENCE = 3
# Limit of a collective among the ranks of a model. Longer than any should take: most failures are found earlier, by a
# closed connection.
COLLECTIVE_S = 60.0
MEET_S = 60.0  # for the members of a broadcast group to come to a broadcast: one may be in a long pass
BUCKET_S = 10.0  # for a bucket of weights to be broadcast, once all members are there, besides its bytes
BUCKET_BYTES_S = 50e6  # bytes a second that a bucket's limit allows for
PREPARED_S = 5.0  # that a version's sender waits for its first bucket, before it announces the version later
REGROUP_S = 30.0  # from a failed broadcast until the controller must have formed a new epoch
CONTROL_LINGER_S = 2.0  # for a process that ends to send its last control messages
DATA_LINGER_S = 1.0  # the same for groups
QUEUE_BEAT_S = 1.0  # between two heartbeats on a queue's connection
# Time without an answer to a queue's heartbeat after which the connection is made anew: one end may not know that it is
# cut.
QUEUE_SILENT_S = 6.0
KILLED_S = 2.0  # from the order to kill an actor until its launcher reports its death; after that it is cut off
OUTCOME_S = 15.0  # for torchrun's workers to learn how a run has ended, once their actors have
LATE_WORD_S = 1.0  # by which a message of an actor may arrive later than its launcher's report
LEDGER_S = 10.0  # for a controller that was left behind to release the ledger
LOCK_RENEW_S = 2.0  # between two renewals of a lock, on a file system that has no locks of its own
LOCK_LEFT_S = 8.0  # without a renewal, after which such a lock's holder has died
MESH_STOP_S = 2.0  # for a process mesh of Monarch to stop
HOST_REACHED_S = 2.0  # for another host to accept a connection, before the next host is tried
HOST_RETRY_S = 2.0  # before a host is tried again, or a node that has ended is started again
# How long the launcher waits for an answer of the process that runs a node, before it checks for how long the node has
# been silent.
HOST_ASKED_S = 2.0
HOST_LOST_S = 30.0  # for a node to answer; after that another host runs the node
# A node that its launcher has not asked anything for this long ends itself, because the launcher has died or cannot
# reach it. This is shorter than HOST_LOST_S, so that no two hosts run one node.
HOST_ALONE_S = 25.0
DOWNLOAD_S = 7200.0  # for the other ranks or nodes to download a model, after which the run does not start
ANSWER_S = 2.0  # for an idle Ray actor to answer
PLACED_S = 30.0  # for a Ray actor that shares a GPU to be placed, before the next is requested
EARLY_STOP_S = 0.5  # for actors to stop when the run ends before all of them are ready
STANDBY_AFTER_S = 1.0  # from the last start of an actor until a spare Ray process is made, since actors start first
SERVER_ASKED_S = 10.0  # for an SGLang server to answer a request that takes no time
SERVER_WEIGHTS_S = 120.0  # for an SGLang server to load a version from files, besides reading them
# For an SGLang server to answer with a whole sample, waiting in its queue included. If the server ends, the connection
# closes earlier.
SERVER_SAMPLE_S = 1800.0
# For actors to stop before all of them start again, besides writing a checkpoint; and for processes to end once the
# controller has.
RESTART_S = 4.0
LAST_WORDS_S = 0.2  # for a process that is ended by force to write the stacks of its threads
BOARDS_S = 10.0  # for TensorBoard, wandb and trackio to write or send what they still hold when a run ends
EXIT_GRACE_S = 0.5  # that a launcher waits beyond deployment.stop_timeout_s
