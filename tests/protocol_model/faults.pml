/* What goes wrong: islands die, come back and stand still, and one lies. */

#define DIE(k) \
    :: atomic { crashes < CRASHES && HAS(MORTAL, k) && !GONE(k) && !LIES(k) -> crashes++; \
        dead[k] = 1; forget_island(k); printf("island %d dies\n", k) }

/* An island that does not come back is heard no more, except for what it has sent. */
inline forget_island(k) {
#if RESTARTS == 0
    forget_votes(k);
    if
    :: state[k] != COMMITTED -> state[k] = STOPPED; attempt[k] = 0; planner_of[k] = NONE
    :: else
    fi;
    forget_heard();
#endif
    forget_attempts()
}
#define FREEZE(k) \
    :: atomic { freezes < FREEZES && HAS(MORTAL, k) && !GONE(k) && !LIES(k) -> freezes++; \
        frozen[k] = 1; printf("island %d stands still\n", k) }

/* An island that stood still asks what the others did. */
#ifdef NO_QUERY_AFTER_FREEZE
#define WAKE(k) :: atomic { frozen[k] -> frozen[k] = 0; printf("island %d goes on\n", k) }
#else
#define WAKE(k) :: atomic { frozen[k] -> frozen[k] = 0; wake(k); printf("island %d goes on\n", k) }
#endif
inline wake(k) {
    if
    :: state[k] == VOTING && vote[AT(k)] != NO -> state[k] = ASKING; forget_votes(k)
    :: else
    fi;
    answers[k] = 0;
    known_lost[k] = 0
}

/* A new incarnation remembers no vote, and takes part in no plan that was made for the old one. */
#define OLD_LIFE 32
#define RESTART(k) :: atomic { restarts < RESTARTS && dead[k] -> restarts++; dead[k] = 0; \
    restart(k); printf("island %d comes back\n", k) }
inline restart(k) {
    if
    :: state[k] == COMMITTED || state[k] == TAKEN
        -> state[k] = TAKEN           /* the checkpoint has it */
    :: state[k] != STOPPED
        -> state[k] = GATHERING                               /* the checkpoint lacks it */
    :: state[k] == STOPPED
    fi;
    if
    :: joined[AT(k)] != 0 && attempt[k] + 1 < A -> joined[AT(k)] = OLD_LIFE; attempt[k]++
    :: joined[AT(k)] != 0 && attempt[k] + 1 >= A -> joined[AT(k)] = OLD_LIFE;
        state[k] = STOPPED; out_of_room = 1
    :: else
    fi;
    planner_of[k] = NONE;
    forget_votes(k);
    forget_lists(k);
    forget_attempts()
}

proctype Faults() {
    do
    EACH(DIE)
    EACH(FREEZE)
    EACH(WAKE)
    EACH(RESTART)
    od
}

#ifdef LIAR
/* Payloads, receipts and proofs that the liar may send are in the rules of those who get them. */
#define TELL(k, a, what) \
    :: atomic { k != LIAR && !GONE(k) && told[(a) * N + (k)] == 0 && joined[(a) * N + (k)] != 0 \
                && attempt[k] == (a) && state[k] == VOTING && HAS(PLAN(k), LIAR) \
                -> told[(a) * N + (k)] = what; \
                    heard[(a) * N + (k)] = heard[(a) * N + (k)] | BIT(LIAR) }
#define TELL_ALL(k) \
    TELL(k, 0, YES) TELL(k, 0, YES_TO_OTHER) TELL(k, 0, NO)
#define OFFER(set) \
    :: atomic { members[LIAR] == 0 && IS_READ(0) -> members[LIAR] = (set) | BIT(LIAR) } \
    :: atomic { members[N] == 0 && IS_READ(0) && members[LIAR] != (set) | BIT(LIAR) \
        -> members[N] = (set) | BIT(LIAR) }
proctype Liar() {
    do
    EACH(TELL_ALL)
#ifndef VOTES_ONLY
    OFFER(1) OFFER(2) OFFER(3) OFFER(4) OFFER(5) OFFER(6) OFFER(7)
#endif
#if N == 4 && LIAR < 3 && !defined(VOTES_ONLY)
    OFFER(8) OFFER(9) OFFER(10) OFFER(11) OFFER(12) OFFER(13) OFFER(14)
#endif
    od
}
#endif
