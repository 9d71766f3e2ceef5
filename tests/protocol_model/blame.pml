/* Attempts at one round beside a liar, as docs/protocol.md tells them under "When attempts
 * fail": with n islands there is an attempt without the liar, which commits, after at most 6 + 3
 * n failed ones. An attempt is one event here.
 *
 *   N       islands, of which island LIAR lies            QUORUM   outer.quorum
 *   RAISES  the liar also raises the number of attempts (the page says that this is not withstood)
 * /
 */
#define HAS(set, k) ((((set) >> (k)) & 1) == 1)
#define BIT(k) (1 << (k))
#define SIZE(set) (((set) & 1) + (((set) >> 1) & 1) + (((set) >> 2) & 1) + (((set) >> 3) & 1))
#define EVERYBODY (BIT(N) - 1)

byte number;                  /* of the attempt */
byte failed;
byte left_out[N];             /* for each island: whom it leaves out, by what it has seen */
bit is_committed;

/* After six failed attempts each minority, which is one island here, is left out in turn, for
 * three attempts each. */
#ifdef NO_TURNS
#define TURN 0
#else
#define TURN (number < 6 -> 0 : BIT(((number - 6) / 3) % N))
#endif

/* Whom the planner takes. If too few are left, it forgives, and then it does without those whose
 * turn it is. */
inline choose(p) {
    members = EVERYBODY & ~left_out[p] & ~TURN;
    if
    :: SIZE(members) < QUORUM -> left_out[p] = 0; members = EVERYBODY & ~TURN
    :: else
    fi;
    if
    :: SIZE(members) < QUORUM -> members = EVERYBODY
    :: else
    fi
}

/* What one honest island makes of a failed attempt: nobody is to blame, or the liar, or another
 * island that the liar accuses and that accuses the liar, and which of the two is left out goes
 * by the round's number. */
inline judge(k) {
    if
    :: true
    :: left_out[k] = left_out[k] | BIT(LIAR)
    :: left_out[k] = left_out[k] | BIT((LIAR + 1) % N)
    fi
}

/* The liar plans if it is its turn by name and nobody's turn to leave it out; otherwise an
 * honest island does. */
inline plan() {
    if
    :: !HAS(TURN, LIAR) -> members = BIT(LIAR)
    :: p = (LIAR + 1) % N; choose(p)
    :: p = (LIAR + 2) % N; choose(p)
    fi
}

init {
    byte members, p, k;
    do
    :: is_committed -> break
    :: !is_committed -> atomic {
        plan();
        if
        :: !HAS(members, LIAR) -> is_committed = 1
        :: HAS(members, LIAR) ->
            printf("the islands of set %d fail in attempt %d\n", members, number);
            failed++;
            number++;
            for (k : 0 .. N - 1) {
                if
                :: k != LIAR -> judge(k)
                :: else
                fi
            }
#ifdef RAISES
            if
            :: number >= 6 && ((number - 6) / 3) % N == LIAR && number < 100 -> number = number + 3
            :: true
            fi;
#endif
            assert(failed <= 6 + 3 * N)
        fi;
        members = 0; p = 0; k = 0 }
    od
}
