// State layers over several tokens of one sequence.
#include "states.h"

#include <algorithm>

#include "state_forward.h"
#include "status.h"

namespace kvkeep {
namespace {

constexpr int kPieceTokens = 64;  // tokens whose projections are held in float32

// A chunk in one layer, piece by piece: whole pieces and the rest.
class ChunkForward {
 public:
  explicit ChunkForward(const StateChunk& chunk)
      : chunk_(chunk),
        team_(chunk.threads),
        pieces_(chunk.tokens / kPieceTokens),
        rest_tokens_(chunk.tokens % kPieceTokens),
        piece_(*chunk.shape, 1, pieces_ ? kPieceTokens : 0, chunk.threads),
        rest_(*chunk.shape, 1, rest_tokens_, chunk.threads) {}

  void run() {
    team_.run([this](int me) { work(me); });
  }

 private:
  void work(int me) {
    for (int i = 0; i < pieces_; ++i) run_piece(me, piece_, i);
    if (rest_tokens_) run_piece(me, rest_, pieces_);
  }

  void run_piece(int me, StateForward& forward, int index) {
    const int first = index * kPieceTokens;
    const std::ptrdiff_t width = chunk_.shape->output_width();
    LayerStates states = chunk_.states;
    if (index) states.inputs = states.new_inputs, states.matrices = states.new_matrices;
    forward.set_projected(me, team_, chunk_, first);
    forward.mix(me, team_, *chunk_.layer, &states, chunk_.out + first * width, width);
  }

  const StateChunk& chunk_;
  ThreadTeam team_;
  const int pieces_, rest_tokens_;
  StateForward piece_, rest_;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_state_chunk(const kvkeep::StateChunk* chunk) {
  using namespace kvkeep;
  return run_guarded([=] {
    ChunkForward(*chunk).run();
    return kDone;
  });
}
