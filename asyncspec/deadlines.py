"""Every deadline of the system that is not a field of the configuration (`deployment.*_timeout_s`), in seconds.

A wait that can end only by somebody else's doing has one of these or one of those; what follows is said in the actor's
log or by the controller, in one line that names who was waited for.
"""

BEAT_EVERY_S = 0.25  # between two signs of life of a process
# times deployment.silent_timeout_s, for a process that is still loading; times start_timeout_s, for one that waits for
# others
LOADING_PATIENCE = 3
# one broadcast; longer than any version should take, its failure is found by a closed connection first
COLLECTIVE_S = 60.0
REGROUP_S = 30.0  # from a failed broadcast until the controller must have formed a new epoch
CONTROL_LINGER_S = 2.0  # what a process that ends may still take to hand over its last words
DATA_LINGER_S = 1.0  # the same for groups
QUEUE_BEAT_S = 1.0  # between two signs of life on a queue's connection
# without an answer to one, after which the connection is made anew: one of its ends may not know that it is cut
QUEUE_SILENT_S = 6.0
KILLED_S = 2.0  # from the order to kill an actor until its launcher tells of its death; then it is cut off
LATE_WORD_S = 1.0  # by which an actor's word may come after its launcher's
LEDGER_S = 10.0  # for a controller that was left behind to let go of the ledger
MESH_STOP_S = 2.0  # a process mesh of Monarch to stop
HOST_REACHED_S = 2.0  # a host elsewhere to take a connection, before another is tried
HOST_RETRY_S = 2.0  # until a host is tried again, or what played a node there is started again
HOST_ASKED_S = 2.0  # what plays a node to answer its launcher, before it is looked how long it has not
HOST_LOST_S = 30.0  # without such an answer; then another host plays the node
# what plays a node, without being asked; then it ends, before another plays the node: its launcher has died, or cannot
# reach it
HOST_ALONE_S = 25.0
ANSWER_S = 2.0  # an idle Ray actor
PLACED_S = 30.0  # a Ray actor that shares a GPU, to be there before another is asked for
EARLY_STOP_S = 0.5  # actors that have not said they are up, once the run is to end
STANDBY_AFTER_S = 1.0  # from the last start of an actor until a spare process of Ray is made: others start first
SERVER_ASKED_S = 10.0  # an SGLang server to do what takes no time
SERVER_WEIGHTS_S = 120.0  # to load a version from files
# to answer with a whole sample, waiting in its queue included; a server that ends closes the connection first
SERVER_SAMPLE_S = 1800.0
LAST_WORDS_S = 0.2  # a process that is ended by force to write where its threads are
EXIT_GRACE_S = 0.5  # a launcher, beyond deployment.stop_timeout_s
