/* What docs/protocol.md promises about one round. */

bit out_of_room;              /* an island needed more attempts than the model has */

/* Island k, which has not died, has aborted the plan of island i, or has committed it or another
 * one. */
#define LIVES(k) (!dead[k] && !LIES(k))
#define ABORTED_SAME(i, k) (LIVES(k) && HAS_LEFT(i, k) && SAME_PLAN(i, k) && planner_of[i] != NONE)
#define COMMITTED_SAME(i, k) (k != i && LIVES(k) && state[k] == COMMITTED \
    && attempt[k] == attempt[i] && SAME_PLAN(i, k))
#define COMMITTED_OTHER(i, k) (k != i && LIVES(k) && state[k] == COMMITTED \
                               && !(attempt[k] == attempt[i] && SAME_PLAN(i, k)))
#define OTHER_DIGEST(i, k) (COMMITTED_SAME(i, k) && vote[attempt[i] * N + (k)] != vote[AT(i)])

#ifdef LIAR
/* Beside a liar histories may part, but nobody commits what it has not voted for, and a plan has
 * one digest. */
inline check_abort(i) { skip }
inline check_commit(i) {
    assert(vote[AT(i)] == YES || vote[AT(i)] == YES_TO_OTHER);
    assert(!ANY(OTHER_DIGEST, i))
}
#else
/* An island that stood still or came back can begin a history of its own unless the quorum is
 * above half. */
#define HISTORIES_MAY_PART (2 * QUORUM <= N && freezes + restarts > 0)
/* While islands only crash or stand still: all that live commit a plan or none does, and a round
 * has one plan. */
inline check_abort(i) { assert(!ANY(COMMITTED_SAME, i)) }
inline check_commit(i) {
    assert(vote[AT(i)] == YES);
    assert(!ANY(ABORTED_SAME, i));
    assert(HISTORIES_MAY_PART || !ANY(COMMITTED_OTHER, i))
}
#endif

/* Connected islands that are well end with one state: the round is committed, or fewer than the
 * quorum live. */
#define UP(k) (1 - (dead[k] || frozen[k]))
#if N == 3
#define ALIVE (UP(0) + UP(1) + UP(2))
#else
#define ALIVE (UP(0) + UP(1) + UP(2) + UP(3))
#endif
#define ENDED(i, k) (GONE(k) || LIES(k) || (state[k] >= COMMITTED && state[k] != WAITS_FOR_EVER))
#define ROUND_ENDS (out_of_room || ALIVE < QUORUM || ALL(ENDED, 0))
#ifdef LIVENESS
ltl round_ends { <> [] ROUND_ENDS }
#endif
/* The same by a search that stores no state twice: every run of the model ends, so what holds
 * where nothing more can happen is what each run comes to. Beside a liar an attempt may fail, and
 * nobody waits for ever. */
#ifdef ENDS
#ifdef LIAR
#define COMES_TO_AN_END ALL(ENDED, 0)
#else
#define COMES_TO_AN_END ROUND_ENDS
#endif
proctype Watch() { timeout -> assert(COMES_TO_AN_END) }
#endif
