/* One round of the agreement between islands, message by message, as docs/protocol.md tells it
 * under "States of an island" and "More than four islands". How it is run and what it leaves
 * out: docs/protocol-model.md.
 *
 *   N         islands                          A         attempts that the model has room for
 *   CRASHES   islands that die at most         RESTARTS  islands that come back at most
 *   FREEZES   islands that stand still at most QUORUM    outer.quorum
 *   LIAR      the island that lies             COORDINATOR  votes go through the planner
 *   LIVENESS, ENDS  check also that the round ends
 * /
 */
#ifndef QUORUM
#define QUORUM 1
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef FREEZES
#define FREEZES 0
#endif

/* A liar can tell two plans of one attempt. The second has the number N. */
#ifdef LIAR
#define PLANS (N + 1)
#define LIES(i) ((i) == LIAR)
#else
#define PLANS N
#define LIES(i) false
#endif
#define NONE 15

#if N == 3
#define EACH(step) step(0) step(1) step(2)
#define ALL(holds, i) (holds(i, 0) && holds(i, 1) && holds(i, 2))
#define EVERY(holds, i) (holds(i, 0) && holds(i, 1) && holds(i, 2))
#define ANY(holds, i) (holds(i, 0) || holds(i, 1) || holds(i, 2))
#define SOME(holds, i) (holds(i, 0) || holds(i, 1) || holds(i, 2))
#define EVERYBODY 7
#else
#define EACH(step) step(0) step(1) step(2) step(3)
#define ALL(holds, i) (holds(i, 0) && holds(i, 1) && holds(i, 2) && holds(i, 3))
#define EVERY(holds, i) (holds(i, 0) && holds(i, 1) && holds(i, 2) && holds(i, 3))
#define ANY(holds, i) (holds(i, 0) || holds(i, 1) || holds(i, 2) || holds(i, 3))
#define SOME(holds, i) (holds(i, 0) || holds(i, 1) || holds(i, 2) || holds(i, 3))
#define EVERYBODY 15
#endif
#ifndef MORTAL
#define MORTAL EVERYBODY
#endif
#define HAS(set, k) ((((set) >> (k)) & 1) == 1)
#define BIT(k) (1 << (k))
#define SIZE(set) (((set) & 1) + (((set) >> 1) & 1) + (((set) >> 2) & 1) + (((set) >> 3) & 1))

/* What an island does. TAKEN: it has taken the state of an island that committed. */
#define GATHERING 0
#define REDUCING 1
#define VOTING 2
#define ASKING 3
#define COMMITTED 4
#define TAKEN 5
#define STOPPED 6
#define WAITS_FOR_EVER 7

/* Votes: none yet, yes to one digest or to another, no. */
#define YES 1
#define YES_TO_OTHER 2
#define NO 3

byte state[N];
byte attempt[N];              /* its number, from 0 */
byte planner_of[N];           /* the plan that an island takes part in, by its planner */
byte members[A * PLANS];      /* participants of the plan of an attempt by a planner;
    0: there is none */
byte joined[A * N];           /* 1 + the planner whose plan the island took part in */
byte vote[A * N];             /* votes that were sent; those of a liar are in `told` */
byte told[A * N];             /* what the liar's vote said to this island */
byte heard[A * N];            /* the islands whose votes have come */
byte receipts[N];             /* the islands that have acknowledged this one's vote */
byte answers[N];              /* the islands that have answered this one's outcome query */
byte known_lost[N];           /* those that this one has found to be lost since it asks */
bit refused[N];               /* one of them has aborted */
bit bound[N];                 /* it has answered "open": it no longer commits on votes alone */
bit dead[N];
bit frozen[N];
byte crashes;
byte restarts;
byte freezes;
#ifdef COORDINATOR
bit to_all[N];                /* it has sent its vote to all, and not to the planner alone */
byte listed[N];
    /* for a planner: the islands that have acknowledged the list of votes */
bit told_all[N];              /* for a planner: it has told that all have acknowledged the list */
#endif

#define AT(i) (attempt[i] * N + (i))
#define PLAN(i) members[attempt[i] * PLANS + planner_of[i]]
#define GONE(k) (dead[k] || frozen[k])
/* Who takes part in the plan of island i, seen from the messages of island k in that attempt. */
#define SAME_PLAN(i, k) (joined[attempt[i] * N + (k)] == planner_of[i] + 1)
#define VOTE_HEARD(i, k) (LIES(k) -> told[AT(i)] : vote[attempt[i] * N + (k)])
#define HOLDS_VOTE(i, k) HAS(heard[AT(i)], k)
#define IN_PLAN(i, k) HAS(PLAN(i), k)

#define AGREES(i, k) (!IN_PLAN(i, k) || (HOLDS_VOTE(i, k) && VOTE_HEARD(i, k) == vote[AT(i)]))
#define CERTIFIED(i) (vote[AT(i)] != NO && ALL(AGREES, i))
#define DISAGREES(i, k) (IN_PLAN(i, k) && HOLDS_VOTE(i, k) && (VOTE_HEARD(i, k) == NO \
    || VOTE_HEARD(i, k) != vote[AT(i)]))
#define RECEIPT(i, k) (!IN_PLAN(i, k) || k == i || LIES(k) || HAS(receipts[i], k))
/* Island k has ended the attempt of island i without a commit. */
#define HAS_LEFT(i, k) (attempt[k] > attempt[i] || state[k] == STOPPED)
/* An island that stands still counts as lost only when the receipts that it has given, and what
 * others have sent, are here: a call that nobody answers takes far longer than a message. Votes
 * that it has not sent yet are stuck. What an island that died has sent can be lost. Mutation:
 * mail is as slow as the call. A liar can look lost at any time. */
#ifdef SLOW_MAIL
#define LOST(i, k) GONE(k)
#else
#define LOST(i, k) (dead[k] || (frozen[k] && !SOME(COMES, i) && !LIST_COMES(i)))
#endif
#define VOTE_COMES(i, k) (!HOLDS_VOTE(i, k) && VOTE_HEARD(i, k) != 0 && SENT_TO(i, k) && !GONE(k))
#define VOTE_GOES(i, k) (vote[AT(i)] != 0 && !GONE(k) && CAME_ALONE(i, k) && !HAS_LEFT(i, k) \
                         && !HAS(heard[attempt[i] * N + (k)], i))
#define RECEIPT_COMES(i, k) (!HAS(receipts[i], k) && CAME_ALONE(i, k) && ACKNOWLEDGED(i, k))
#define COMES(i, k) (k != i && IN_PLAN(i, k) && SAME_PLAN(i, k) \
                     && (VOTE_COMES(i, k) || RECEIPT_COMES(i, k) || VOTE_GOES(i, k)))
#ifdef COORDINATOR
/* The planner is still to pass the votes on, or to say that all have them. */
#define LIST_COMES(i) (told_all[AT_PLANNER(i)] || PLANNER_GOES_ON(P(i), attempt[i]))
#define PLANNER_GOES_ON(p, a) (!GONE(p) && attempt[p] == (a) && state[p] == VOTING && !bound[p] \
    && CERTIFIED(p) \
                               && EVERY(WILL_LIST, p))
#define WILL_LIST(p, k) (!IN_PLAN(p, k) || k == p || HAS(listed[p], k) || !GONE(k))
#else
#define LIST_COMES(i) false
#endif
/* Something is missing of an island that is lost, or that takes no part. */
#define MISSES(i, k) (IN_PLAN(i, k) && k != i && (!HOLDS_VOTE(i, k) || !HAS(receipts[i], k)) \
                      && (LOST(i, k) || LIES(k) || CANNOT_JOIN(i, k) || HAS_LEFT(i, k)))
/* Mutation: who has said "open" is not asked again when another is lost. */
#ifdef NO_ASKING_AGAIN
#define FOUND_LOST(i, k) GONE(k)
#else
#define FOUND_LOST(i, k) (GONE(k) && HAS(known_lost[i], k))
#endif
#define ANSWERED(i, k) (!IN_PLAN(i, k) || k == i || HAS(answers[i], k) || FOUND_LOST(i, k) \
    || LIES(k))

#include "checks.pml"

inline begin_attempt(i) {
    state[i] = GATHERING;
    planner_of[i] = NONE;
    forget_votes(i);
    forget_lists(i)
}

/* What is set back here and below is read by no rule any more: states that differ in it alone are
 * one state. */
inline forget_votes(i) {
#ifdef COORDINATOR
    listed[i] = 0;
#endif
    receipts[i] = 0;
    answers[i] = 0;
    known_lost[i] = 0;
    refused[i] = 0;
    bound[i] = 0
}

/* What the liar has told counts while an island waits for votes. */
inline forget_liar(i) {
#ifdef LIAR
    told[AT(i)] = 0;
    heard[AT(i)] = heard[AT(i)] & ~BIT(LIAR)
#else
    skip
#endif
}

/* An island that waits for no votes hears those of islands that wait for its receipt. */
#if FREEZES > 0 || defined(HELD_CERTIFICATE)
#define NEEDS(i, k) true
#else
#define NEEDS(i, k) (state[i] == VOTING || PASSES_ON(i) || AWAITS(i, k))
#endif
#ifdef COORDINATOR
#define PASSES_ON(i) (joined[AT(i)] == (i) + 1)
#else
#define PASSES_ON(i) false
#endif
#define AWAITS(i, k) (state[k] == VOTING && !dead[k] && attempt[k] == attempt[i])
#define HELD(i, k) (HOLDS_VOTE(i, k) && NEEDS(i, k) -> BIT(k) : 0)
#if N == 3
#define HELD_SET(i) (HELD(i, 0) + HELD(i, 1) + HELD(i, 2))
#else
#define HELD_SET(i) (HELD(i, 0) + HELD(i, 1) + HELD(i, 2) + HELD(i, 3))
#endif
inline forget_heard() {
    d_step {
        for (slot : 0 .. N - 1) {
            if
            :: state[slot] != COMMITTED && state[slot] != REDUCING && state[slot] != GATHERING ->
                heard[AT(slot)] = HELD_SET(slot)
            :: else
            fi
        }
        slot = 0
    }
}

/* Who may still read what was said in attempt a: those that have not gone beyond it. */
#define MAY_COME(k) (!dead[k] || restarts < RESTARTS)
#define READS(a, k) (MAY_COME(k) && !LIES(k) && attempt[k] <= (a) \
    && (GONE(k) || state[k] < COMMITTED))
#define IS_READ(a) ANY(READS, a)
hidden byte old;
hidden byte slot;
inline forget_attempts() {
#if A > 1
    d_step {
        for (old : 0 .. A - 1) {
            if
            :: IS_READ(old)
            :: else ->
                for (slot : 0 .. N - 1) {
                    joined[old * N + slot] = 0;
                    vote[old * N + slot] = 0;
                    told[old * N + slot] = 0;
                    heard[old * N + slot] = 0
                }
                for (slot : 0 .. PLANS - 1) { members[old * PLANS + slot] = 0 }
            fi
        }
        old = 0;
        slot = 0
    }
#else
    skip
#endif
}

inline forget_lists(i) {
#ifdef COORDINATOR
    to_all[i] = 0;
    listed[i] = 0
#else
    skip
#endif
}

/* Mutation: after an abort nobody tries again. */
#ifdef NO_NEXT_ATTEMPT
#define ABORT_ENDS true
#else
#define ABORT_ENDS false
#endif

inline abort_attempt(i) {
    printf("island %d aborts attempt %d\n", i, attempt[i]);
    check_abort(i);
    forget_liar(i);
    state[i] = STOPPED;
    forget_heard();
    attempt[i]++;
    begin_attempt(i);
    if
    :: ABORT_ENDS -> state[i] = WAITS_FOR_EVER
    :: !ABORT_ENDS && attempt[i] >= A -> out_of_room = 1; attempt[i] = A - 1; state[i] = STOPPED
    :: else
    fi;
    forget_attempts()
}

inline commit(i) {
    printf("island %d commits attempt %d\n", i, attempt[i]);
    check_commit(i);
    state[i] = COMMITTED;
    heard[AT(i)] = PLAN(i);   /* Its certificate has the votes of all: it acknowledges each. */
    forget_liar(i);
    forget_votes(i);
    forget_heard();
    forget_attempts()
}

#include "gathering.pml"
#include "voting.pml"
#include "faults.pml"

proctype Island(byte i) {
#ifdef VOTES_ONLY
    do
    REDUCE
    VOTE
    ASK
    od
#endif
    do
    GATHER
    REDUCE
    VOTE
    ASK
    od
}

init {
    byte i;
    atomic {
        for (i : 0 .. N - 1) {
            planner_of[i] = NONE;
#ifdef VOTES_ONLY
            members[0] = EVERYBODY;
            joined[i] = 1;
            planner_of[i] = 0;
            state[i] = REDUCING;
#ifndef LIAR
            cast(i, YES);
#endif
#endif
            if
            :: LIES(i) -> state[i] = STOPPED
            :: else -> run Island(i)
            fi
        }
        run Faults();
#ifdef ENDS
        run Watch();
#endif
#ifdef LIAR
        run Liar();
#endif
    }
}
