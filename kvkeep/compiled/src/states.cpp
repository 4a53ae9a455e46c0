// State layers over several tokens of one sequence.
#include "states.h"

#include <omp.h>

#include <algorithm>

#include "state_forward.h"
#include "status.h"

namespace kvkeep {
namespace {

constexpr int kPieceTokens = 64;  // tokens whose projections are held in float32

// A chunk in one layer, piece by piece: whole pieces and the rest.
class ChunkForward {
 public:
  ChunkForward(const StateChunk& chunk, int threads)
      : chunk_(chunk),
        threads_(threads),
        team_(threads),
        pieces_(chunk.tokens / kPieceTokens),
        rest_tokens_(chunk.tokens % kPieceTokens),
        piece_(*chunk.shape, 1, pieces_ ? kPieceTokens : 0, threads),
        rest_(*chunk.shape, 1, rest_tokens_, threads) {}

  void run() {
    bool single_thread = false;
#pragma omp parallel num_threads(threads_)
    {
      if (omp_get_num_threads() == threads_)
        work(omp_get_thread_num());
      else if (omp_get_thread_num() == 0)
        single_thread = true;
    }
    if (single_thread) ChunkForward(chunk_, 1).run();
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
  const int threads_;
  ThreadTeam team_;
  const int pieces_, rest_tokens_;
  StateForward piece_, rest_;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_state_chunk(const kvkeep::StateChunk* chunk) {
  using namespace kvkeep;
  return run_guarded([=] {
    ChunkForward(*chunk, chunk->threads).run();
    return kDone;
  });
}
