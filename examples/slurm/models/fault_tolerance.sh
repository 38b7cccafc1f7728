# Flags of moe_ft for a model of this folder, by STRATEGY; model files source this file.
# shellcheck shell=bash disable=SC2034  # the batch script reads FAULT_TOLERANCE_FLAGS
#
# dense: exact, and less memory than sparse. It needs a network that carries everything in INTERVAL iterations.
# sparse: exact. Where the network is slower than that, every iteration sends a part; else it does what
#   dense does, with 40 % more memory.
# partial: the fewest bytes to send and to store. What experts lose is counted and limited.
# selective: as many experts in each snapshot as fit into a budget of bytes. What experts lose is counted. Where all
# fit, as on the networks of plan.sh, dense needs half of its memory; so it is not in the tables.
#
# The tables of the model files say, of each: host memory of a node; the most bytes of a checkpoint on storage; the
# iterations from one to the next, which a failure of all nodes repeats; the iterations that other failures repeat;
# and the iterations whose updates of experts are lost, also where all nodes fail. plan.sh calculates them.
#
# The batch script adds --moe-ft-persist-dir. A model file sets what depends on its size; all can be set from outside.
STRATEGY=${STRATEGY:-dense}               # none, dense, sparse, partial or selective
REPLICAS=${REPLICAS:-auto}                # copies on other nodes; auto: 2, or 1 where there are two nodes
PERSIST_INTERVAL=${PERSIST_INTERVAL:-50}  # snapshots, or windows, for each checkpoint on storage
INTERVAL=${INTERVAL:-1}                   # all but sparse: iterations between snapshots
MAX_WINDOW=${MAX_WINDOW:-4}               # sparse: snapshots of the longest window; memory is reserved for it
K_SNAPSHOT=${K_SNAPSHOT:-auto}            # partial: experts of a layer in a snapshot
K_PERSIST=${K_PERSIST:-1}                 # partial: of these go to storage
LOCAL_BUDGET=${LOCAL_BUDGET:-auto}        # selective: bytes of a rank in a snapshot; auto: what training hides
REMOTE_BUDGET=${REMOTE_BUDGET:-auto}      # selective: of these to each peer

case "$STRATEGY" in
    none) FAULT_TOLERANCE_FLAGS=() ;;
    dense)
        FAULT_TOLERANCE_FLAGS=(
            --moe-ft-strategy dense                         # everything in every snapshot
            --moe-ft-interval "$INTERVAL"                   # as often as the network can send it
            --moe-ft-replication-factor "$REPLICAS"         # for nodes that fail
            --moe-ft-persist-interval "$PERSIST_INTERVAL"   # for a failure of all nodes
        )
        ;;
    sparse)
        FAULT_TOLERANCE_FLAGS=(
            --moe-ft-strategy sparse                        # a part of the state in every iteration
            --moe-ft-window auto                            # as few parts as bandwidths allow
            --moe-ft-max-window "$MAX_WINDOW"               # and no more than these
            --moe-ft-replication-factor "$REPLICAS"         # for nodes that fail
            --moe-ft-persist-interval "$PERSIST_INTERVAL"   # for a failure of all nodes
        )
        ;;
    partial)
        FAULT_TOLERANCE_FLAGS=(
            --moe-ft-strategy partial                       # some experts of each layer in every snapshot
            --moe-ft-interval "$INTERVAL"                   # as often as the network can send it
            --moe-ft-k-snapshot "$K_SNAPSHOT"               # experts of a layer in memory
            --moe-ft-k-persist "$K_PERSIST"                 # and on storage
            --moe-ft-dynamic-k                              # more of both as lost tokens add up
            --moe-ft-replication-factor "$REPLICAS"         # for nodes that fail
            --moe-ft-persist-interval "$PERSIST_INTERVAL"   # for a failure of all nodes
        )
        ;;
    selective)
        FAULT_TOLERANCE_FLAGS=(
            --moe-ft-strategy selective                     # in every snapshot the experts with the most to lose
            --moe-ft-interval "$INTERVAL"                   # as often as the network can send it
            --moe-ft-local-budget "$LOCAL_BUDGET"           # as many as this holds in memory
            --moe-ft-remote-budget "$REMOTE_BUDGET"         # and on other nodes
            --moe-ft-replication-factor "$REPLICAS"         # for nodes that fail
            --moe-ft-persist-interval "$PERSIST_INTERVAL"   # for a failure of all nodes
        )
        ;;
    *) echo "STRATEGY=$STRATEGY must be none, dense, sparse, partial or selective" >&2 && exit 2 ;;
esac
