/* The data ledger: who reads which unit, and what a commit settles ("Who reads what"). */

/* Begin the next inner steps: the unit of the lease, or one of two places beyond the frontier. */
inline train(i) {
    read_on[i] = holds[i];
    if
    :: lease[holds[i] * N + i] != 0 -> reads[i] = lease[holds[i] * N + i]
    :: else ->
        if
        :: reads[i] = frontier[holds[i]]
        :: reads[i] = frontier[holds[i]] + 1
        fi
    fi
}

/* A commit settles what its participants have read: no unit twice. */
inline settle() {
    assert(!HAS(trained[made], reads[k] - 1));
    trained[made] = trained[made] | BIT(reads[k] - 1);
    if
    :: reads[k] >= frontier[made] -> frontier[made] = reads[k] + 1
    :: else
    fi
}

/* Participants get new leases. Who misses two commits loses its own: the unit is not read again
 * in this model. */
inline renew_lease() {
    lease[made * N + k] = lease[base * N + k];
    if
    :: HAS(set, k) -> lease[made * N + k] = frontier[made]; frontier[made]++;
        missed[made * N + k] = 0
    :: else ->
        missed[made * N + k] = missed[base * N + k] + 1;
        if
        :: missed[made * N + k] >= 2 -> lease[made * N + k] = 0
        :: else
        fi
    fi
}
