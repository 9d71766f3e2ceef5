/* Several rounds: commits, cuts, restarts from checkpoints, states that are taken, and the data
 * ledger, as docs/protocol.md tells them under "When histories diverge" and "Who reads what". A
 * commit is one event here: agreement.pml shows how far it is one. How it is run and what it
 * leaves out: docs/protocol-model.md.
 *
 *   N        islands                             ROUNDS    rounds of the run
 *   CUTS     cuts of the network                 CRASHES   islands that die; each can come back
 *   QUORUM   outer.quorum                        LIAR      the last island lies
 * /
 */
#ifndef CUTS
#define CUTS 0
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifdef LIAR
#define HONEST (N - 1)
#else
#define HONEST N
#endif
#ifdef JOINERS
#define HOLDERS_OF_LEASES 1
#else
#define HOLDERS_OF_LEASES HONEST
#endif
#define STATES 7              /* committed states that the model has room for; 0 is the start */
#define FAKE STATES           /* the state that the liar has made up */
#define UNITS 15              /* a unit is what an island reads in a round; \
    they are numbered from 1 */

#define HAS(set, k) ((((set) >> (k)) & 1) == 1)
#define BIT(k) (1 << (k))
#define SIZE(set) (((set) & 1) + (((set) >> 1) & 1) + (((set) >> 2) & 1) + (((set) >> 3) & 1))
#define EVERYBODY (BIT(N) - 1)

byte num_states = 1;
byte round_of[STATES + 1];
byte tokens[STATES + 1];
byte signers[STATES + 1];     /* who has signed the state's certificate */
short trained[STATES + 1];    /* units that the state's history has settled */
byte frontier[STATES + 1];    /* the first unit that has never been leased */
byte lease[(STATES + 1) * N]; /* the unit that is leased to an island; 0: none */
byte missed[(STATES + 1) * N];
byte before[STATES + 1];      /* the state that the commit began from */

byte holds[N];                /* the state of an island */
byte reads[N];                /* the unit of its progress */
byte read_on[N];              /* the state on which it made that progress */
byte saved[N];
bit dead[N];
byte side = EVERYBODY;        /* islands on one side of the cut */
byte cuts;
byte crashes;
bit is_full;

#define CONNECTED(i, k) (HAS(side, i) == HAS(side, k))
#define HOLDS(k, s) ((k) < HONEST && !dead[k] && holds[k] == (s) -> BIT(k) : 0)
#if N == 3
#define HOLDERS(s) (HOLDS(0, s) + HOLDS(1, s) + HOLDS(2, s))
#define EACH(step) step(0) step(1) step(2)
#define ALL(what, i) (what(i, 0) && what(i, 1) && what(i, 2))
#else
#define HOLDERS(s) (HOLDS(0, s) + HOLDS(1, s) + HOLDS(2, s) + HOLDS(3, s))
#define EACH(step) step(0) step(1) step(2) step(3)
#define ALL(what, i) (what(i, 0) && what(i, 1) && what(i, 2) && what(i, 3))
#endif

/* More tokens, then the higher round, then more islands that hold it or have signed, then the
 * lower digest. */
#define WEIGHT(s) SIZE(HOLDERS(s) | signers[s])
#define SURVIVES(s, t) (tokens[s] > tokens[t] || (tokens[s] == tokens[t] \
    && (round_of[s] > round_of[t] \
    || (round_of[s] == round_of[t] && (WEIGHT(s) > WEIGHT(t) || (WEIGHT(s) == WEIGHT(t) \
        && (s) < (t)))))))
/* As many as the quorum stand behind a state. Mutation: a claim is followed without proof. */
#ifdef NO_PROOF
#define PROVED(s) true
#else
#define PROVED(s) (SIZE(HOLDERS(s) | signers[s]) >= QUORUM || (s) == 0)
#endif
#define AHEAD(k, i) (!dead[k] && CONNECTED(i, k) && holds[k] != holds[i] && PROVED(holds[k]) \
                     && SURVIVES(holds[k], holds[i]))
#define NOT_AHEAD(i, k) ((k) == i || !AHEAD(k, i) || (k) >= HONEST)
#define READY(i, k) (k < HONEST && !dead[k] && CONNECTED(i, k) && holds[k] == holds[i])

#include "ledger.pml"

/* The participants of the plan of island i. Of two that read one unit the first by name stays,
 * and the other chooses again. Some can be late: the grace has run out, and the quorum is there
 * without them. */
#ifdef OVERLAPS
#define IS_APART(units, k) true
#else
#define IS_APART(units, k) (!HAS(units, reads[k] - 1))
#endif
inline choose(i) {
    for (k : 0 .. HONEST - 1) {
        if
        :: READY(i, k) && IS_APART(units, k) -> set = set | BIT(k);
            units = units | BIT(reads[k] - 1)
        :: READY(i, k) && !IS_APART(units, k) -> again = again | BIT(k)
        :: else
        fi
    }
    for (k : 0 .. HONEST - 1) {
        if
        :: k != i && HAS(set, k) && SIZE(set) > QUORUM -> set = set - BIT(k)
        :: true
        fi
    }
}

inline commit(i) {
    choose(i);
    if
    :: SIZE(set) < QUORUM || !HAS(set, i) ->
        for (k : 0 .. HONEST - 1) {
            if
            :: HAS(again, k) -> reads[k] = 2 * frontier[holds[k]] + 1 - reads[k]
            :: else
            fi
        }
    :: SIZE(set) >= QUORUM && HAS(set, i) && num_states == STATES -> is_full = 1
    :: SIZE(set) >= QUORUM && HAS(set, i) && num_states < STATES -> make_state()
    fi;
    made = 0; base = 0; set = 0; units = 0; again = 0; k = 0
}

inline make_state() {
    base = holds[i];
    made = num_states;
    num_states++;
    round_of[made] = round_of[base] + 1;
    tokens[made] = tokens[base] + SIZE(set);
    signers[made] = set;
    before[made] = base;
    frontier[made] = frontier[base];
    trained[made] = trained[base];
    printf("the islands of set %d commit round %d: ", set, round_of[made]);
    printf("state %d after state %d\n", made, base);
    for (k : 0 .. HONEST - 1) {
        if
        :: HAS(set, k) -> settle()
        :: else
        fi
    }
    for (k : 0 .. HONEST - 1) { renew_lease() }
    check_history();
    for (k : 0 .. HONEST - 1) {
        if
        :: HAS(set, k) -> adopt()
        :: else
        fi
    }
}

/* A checkpoint may be saved after any commit. */
inline adopt() {
    holds[k] = made;
    if
    :: CRASHES > 0 -> saved[k] = made
    :: true
    fi;
    train(k)
}

/* Take a state. Progress is re-based if the island has missed one commit, which does not contain
 * it. */
#ifdef REBASE_ALWAYS
#define KEEPS(i, s) true
#else
#define KEEPS(i, s) (before[s] == holds[i] && read_on[i] == holds[i] && (s) != FAKE \
    && !HAS(signers[s], i) \
                     && lease[(s) * N + (i)] == reads[i])
#endif
inline take(i, s) {
    printf("island %d takes state %d in place of %d\n", i, s, holds[i]);
    assert(s != FAKE);
    if
    :: KEEPS(i, s) -> holds[i] = s
    :: else -> holds[i] = s; train(i)
    fi
}

/* With a quorum above half and no restart from an older state one history alone goes on. */
#ifdef ONE_HISTORY
#define HISTORIES_MAY_PART false
#else
#define HISTORIES_MAY_PART (2 * QUORUM <= N)
#endif
#define PARTS(made, s) ((s) != made && (s) < num_states && round_of[s] == round_of[made])
#define HAVE_PARTED (PARTS(made, 1) || PARTS(made, 2) || PARTS(made, 3) \
                    || PARTS(made, 4) || PARTS(made, 5))
inline check_history() {
    assert(HISTORIES_MAY_PART || crashes > 0 || !HAVE_PARTED)
}

#ifdef NO_CATCH_UP
#define TAKE(k)
#else
#define TAKE(k) :: atomic { !dead[i] && k != i && k < HONEST && AHEAD(k, i) -> take(i, holds[k]) }
#endif
#ifdef LIAR
#define TAKE_FAKE :: atomic { !dead[i] && CONNECTED(i, N - 1) && holds[i] != FAKE && PROVED(FAKE) \
    -> take(i, FAKE) }
#else
#define TAKE_FAKE
#endif

#define READY_BIT(i, k) (READY(i, k) -> 1 : 0)
#if N == 3
#define NUM_READY(i) (READY_BIT(i, 0) + READY_BIT(i, 1) + READY_BIT(i, 2))
#else
#define NUM_READY(i) (READY_BIT(i, 0) + READY_BIT(i, 1) + READY_BIT(i, 2) + READY_BIT(i, 3))
#endif
#define MAY_COMMIT(i) (!dead[i] && round_of[holds[i]] < ROUNDS && !is_full && ALL(NOT_AHEAD, i) \
                       && NUM_READY(i) >= QUORUM)

proctype Island(byte i) {
    byte made, base, set, again, k;
    short units;
    do
    :: atomic { MAY_COMMIT(i) -> commit(i) }
    EACH(TAKE) TAKE_FAKE
    od
}

#define DIE(k) \
    :: atomic { k < HONEST && crashes < CRASHES && !dead[k] -> crashes++; dead[k] = 1; \
        printf("island %d dies\n", k) }
#define COME_BACK(k) \
    :: atomic { k < HONEST && dead[k] -> dead[k] = 0; holds[k] = saved[k]; train(k); \
                printf("island %d comes back with state %d\n", k, holds[k]) }
#define CUT(set) \
    :: atomic { cuts < CUTS && side == EVERYBODY -> cuts++; side = set; \
        printf("cut: %d on one side\n", set) }

proctype Faults() {
    do
    EACH(DIE)
    EACH(COME_BACK)
    CUT(1) CUT(2) CUT(3) CUT(4)
#if N == 4
    CUT(5) CUT(6) CUT(7)
#endif
    :: atomic { side != EVERYBODY -> side = EVERYBODY; printf("the cut is healed\n") }
    od
}

/* In the end all islands that live hold one state, that of the last round. */
#define SAME(i, k) ((k) >= HONEST || dead[k] || (holds[k] == holds[i] \
    && round_of[holds[k]] == ROUNDS))
#define ALIKE ((dead[0] || ALL(SAME, 0)) && (dead[1] || ALL(SAME, 1)))
#ifdef LIVENESS
ltl all_alike { <> [] (is_full || ALIKE) }
#endif
#ifdef ENDS
proctype Watch() { timeout -> assert(is_full || ALIKE) }
#endif

init {
    byte i;
    atomic {
        frontier[0] = 1 + HOLDERS_OF_LEASES;
        for (i : 0 .. HONEST - 1) {
            if
            :: i < HOLDERS_OF_LEASES -> lease[i] = i + 1
            :: else
            fi;
            train(i)
        }
#ifdef LIAR
        tokens[FAKE] = 100;
        round_of[FAKE] = ROUNDS;
        signers[FAKE] = BIT(N - 1);
        holds[N - 1] = FAKE;
#endif
        for (i : 0 .. HONEST - 1) { run Island(i) }
#ifdef ENDS
        run Watch();
#endif
        run Faults()
    }
}
