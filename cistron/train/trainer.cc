#include "cistron/train/trainer.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/comm/self.h"
#include "cistron/data/read_ahead.h"
#include "cistron/io/checkpoint.h"
#include "cistron/io/file.h"
#include "cistron/model/hugging_face.h"
#include "cistron/parallel/agreement.h"
#include "cistron/parallel/mesh.h"
#include "cistron/parallel/rank_sums.h"
#include "cistron/tensor/trace.h"
#include "cistron/train/checkpoint_saver.h"
#include "cistron/train/evaluate.h"
#include "cistron/train/expert_bases.h"
#include "cistron/train/explain_run.h"
#include "cistron/train/failure_text.h"
#include "cistron/train/machine_peak.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/memory_plan.h"
#include "cistron/train/metrics.h"
#include "cistron/train/model_source.h"
#include "cistron/train/profile.h"
#include "cistron/train/progress.h"
#include "cistron/train/rank_start.h"
#include "cistron/train/reading_rules.h"
#include "cistron/train/run_description.h"
#include "cistron/train/step_runner.h"
#include "cistron/train/training_state.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

optim::AdamWOptions OptimizerOptions(const OptimOptions& o) {
  return {
      .adamw = {.beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay},
      .max_grad_norm = o.clip,
      .decay_embeddings = o.decay_embeddings,
      .decay_all = o.decay_all};
}

// Of a GPU: of its tensors. Of a CPU: of the process.
std::int64_t PeakMemory(const ops::Context& ctx) {
  if (ctx.device().type == DeviceType::kCuda) return ctx.allocator().Stats().peak_bytes;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{usage.ru_maxrss} * 1024;
}

// The most that any rank has, on every rank.
std::int64_t MostOf(comm::Communicator& ranks, std::int64_t mine) {
  const Tensor most = Tensor::Zeros({1}, DType::kI64);
  most.span<std::int64_t>()[0] = mine;
  if (ranks.size() > 1) ranks.AllReduce(most, comm::ReduceOp::kMax);
  return most.span<std::int64_t>()[0];
}

// Where ranks exchange token rows, operations are ops of the profile.
class ExchangesInProfile final : public comm::Observer {
 public:
  ExchangesInProfile(comm::Communicator& group, Profile& profile)
      : group_(group), profile_(profile) {
    group_.SetObserver(this);
  }
  ~ExchangesInProfile() override { group_.SetObserver(nullptr); }
  ExchangesInProfile(const ExchangesInProfile&) = delete;
  ExchangesInProfile& operator=(const ExchangesInProfile&) = delete;

  void Begin(std::string_view operation, std::string_view transport) override {
    profile_.Begin(operation, transport);
  }

 private:
  comm::Communicator& group_;
  Profile& profile_;
};

// The model of a run, with what a reader of its weights must know about the data.
model::MixtralConfig ModelOf(const RunConfig& config) {
  model::MixtralConfig model = config.model;
  SetReadingRules(model, RulesOf(config.data));
  return model;
}

// Where a run continues; nothing when it has saved nothing yet. A run whose checkpoints are all
// damaged must not start from zero in silence, and overwrite what may be restored.
std::optional<fs::path> CheckpointToResume(const fs::path& root) {
  const auto newest = io::NewestGoodCheckpoint(root);
  if (!newest && io::HasCheckpointDirectories(root)) {
    CISTRON_THROW(kBadInput,
                  "{}: the run has checkpoints, but none of them is whole; restore one from a "
                  "copy, or start anew with run.on_exists=new or another output",
                  root.string());
  }
  return newest;
}

// Whether the run will continue from a checkpoint, and so needs no initial weights.
bool HasCheckpoint(const RunConfig& config) {
  if (config.run.on_exists == OnExists::kNew) return false;
  return CheckpointToResume(RunPaths{config.output}.checkpoints()).has_value();
}

parallel::ExpertExchange ExpertExchangeOf(const RunConfig& config) {
  return {.why_by_host = config.WhyRowsByHost(),
          .buffer_factor = config.parallel.ep_buffer_factor,
          .limit_s = static_cast<double>(config.parallel.timeout)};
}

class Trainer {
 public:
  // On every rank of the mesh, with the same configuration; `device` is this rank's.
  Trainer(const LoadedConfig& loaded, const TrainHooks& hooks, const parallel::Mesh& mesh,
          Device device)
      : config_(loaded.config),
        hooks_(hooks),
        mesh_(mesh),
        profile_(device),
        exchanges_(mesh.expert_group(), profile_),
        ctx_(ops::Context(device).WithStrict(config_.strict).WithRecorder(&profile_)),
        corpus_(data::Corpus::Open(DataOf(config_))),
        model_(ctx_, ModelOf(config_), ModelDType(config_.precision), config_.HasMasters(), &mesh,
               {.sharded = config_.parallel.shard == Sharding::kFull,
                .quantized_rows = config_.parallel.ep_rows == TravellingRows::kQuantized,
                .expert_exchange = ExpertExchangeOf(config_)}),
        optimizer_(ctx_, model_.store, OptimizerOptions(config_.optim), model_.statistics.get()),
        stream_(std::make_unique<data::TrainingStream>(corpus_, config_.seed,
                                                       config_.batch.global_tokens)) {
    if (config_.data.split.kind != data::SplitRule::Kind::kNone) {
      heldout_ = std::make_unique<data::EvaluationStream>(corpus_);
    }
    model_.model.SetRecompute(config_.recompute);
    model_.store.SetGradientDType(config_.GradientDType());
    if (config_.init.from.empty()) {
      model_.store.Initialize(config_.seed, config_.model.initializer_range);
    } else if (!HasCheckpoint(config_)) {
      LoadWeights(FindModel(config_.init.from), model_.store);
    }
    {
      const quant::Autocast autocast(recipe_, Scope(/*training=*/false));
      CheckImplementations(ctx_, ChooseImplementations(ctx_, config_, stream_->window_lengths()),
                           model_.model);
    }
    position_.fingerprint = corpus_->fingerprint();
  }

  // Of the data that this rank reads.
  std::uint64_t fingerprint() const { return corpus_->fingerprint(); }

  // Only now, with everything checked on every rank, something appears on disk.
  void Open(const LoadedConfig& loaded) {
    const std::string resumed = parallel::FromFirst(mesh_.world(), [&]() -> std::string {
      directory_.emplace(loaded);
      if (!directory_->resumes()) return {};
      const auto newest = CheckpointToResume(RunPaths{config_.output}.checkpoints());
      if (!newest) Print("no complete checkpoint yet: the run starts from its beginning");
      return newest ? newest->string() : std::string();
    });
    if (!resumed.empty()) {
      parallel::FromAll(mesh_.world(), [&] {
        Resume(resumed);
        return std::string();
      });
    }
    parallel::FromFirst(mesh_.world(), [&] {
      directory_->WriteConfig(config_);
      return std::string();
    });
    saver_.emplace(RunPaths{config_.output}.checkpoints(), config_.checkpoint.keep, mesh_.world());
  }

  TrainOutcome Run() {
    if (directory_ && !directory_->notice().empty()) Print(directory_->notice());
    for (const std::string& line :
         DescribeRun(config_, *corpus_, mesh_, ctx_.device(), model_.expert_ranks)) {
      Print(line);
    }
    const RunPaths paths{config_.output};
    const std::int64_t total = config_.train.steps;
    TrainOutcome outcome{paths, optimizer_.step(), false, {}, std::nullopt};
    const std::string complete = parallel::FromFirst(mesh_.world(), [&]() -> std::string {
      const auto summary = ReadSummary(paths.results());
      if (summary && summary->steps == total && outcome.steps == total) {
        outcome.heldout = summary->heldout;
        outcome.idle_experts = IdleAtTheEnd(paths);
        return "complete";
      }
      if (summary) fs::remove(paths.results());
      return {};
    });
    if (!complete.empty()) {
      Print("this run is complete; nothing was done");
      outcome.finished = true;
      return outcome;
    }
    if (!RunSteps(outcome)) return outcome;
    Finish(outcome);
    return outcome;
  }

 private:
  void Print(const std::string& text) {
    if (!mesh_.is_first()) return;
    std::fprintf(hooks_.out, "%s\n", text.c_str());
    std::fflush(hooks_.out);
  }

  // `training`: amax is recorded, and taken over ranks. In evaluation ranks have batches that one
  // rank would have one after another.
  quant::AutocastOptions Scope(bool training) {
    return {HighPrecisionLayersOf(config_.recipe, config_.model.num_hidden_layers), &scaling_,
            training, training && mesh_.size() > 1 ? &amax_reducer_ : nullptr};
  }

  void Resume(const fs::path& checkpoint) {
    position_ = RestoreTrainingState(checkpoint, model_, optimizer_, scaling_);
    CheckData(checkpoint);
    stream_->Restore(position_.stream);
    Print(fmt::format("resuming from {}", checkpoint.string()));
    if (optimizer_.step() > config_.train.steps) {
      CISTRON_THROW(kBadInput, "train.steps={}: the run in {} has made {} steps already",
                    config_.train.steps, config_.output.string(), optimizer_.step());
    }
  }

  // The position means nothing in other data.
  void CheckData(const fs::path& checkpoint) {
    if (position_.fingerprint == corpus_->fingerprint()) return;
    if (config_.run.on_exists != OnExists::kResume) {
      CISTRON_THROW(
          kBadInput,
          "{}: the data is not what the run was trained on (a file of data.train or data.heldout "
          "has changed, or others are given); put it back, start anew with run.on_exists=new, or "
          "go on with the "
          "new data by run.on_exists=resume",
          checkpoint.string());
    }
    Print("the data has changed since the checkpoint: the run goes on from its start");
    position_.stream = {.step = position_.stream.step};
    position_.fingerprint = corpus_->fingerprint();
  }

  // Steps to the end; false when a stop was asked for before it.
  bool RunSteps(TrainOutcome& outcome) {
    const std::int64_t start = outcome.steps, total = config_.train.steps;
    std::optional<MetricsWriter> metrics;  // of the first rank
    if (mesh_.is_first()) metrics.emplace(outcome.paths.metrics(), start);
    flops_per_token_ = model::TrainingFlopsPerToken(config_.model, config_.data.seq_len);
    std::string speed = fmt::format("speed: {} flop a token", FormatCount(flops_per_token_));
    // A CPU's rate changes with what runs beside, so a part of one measurement would mean nothing.
    if (ctx_.device().type == DeviceType::kCuda) {
      peak_flops_ = MeasurePeakFlops(ctx_, ModelDType(config_.precision));
      speed +=
          fmt::format("; this GPU multiplies matrices at {:.0f} TFLOP/s, of which MFU is the part",
                      peak_flops_ / 1e12);
    }
    Print(speed);
    Progress progress(Out(), start, total, config_.log.every, std::string(unit_),
                      hooks_.lines_only);
    StepRunner runner(ctx_, model_, optimizer_, {config_.train.cuda_graph, config_.seed});
    data::ReadAhead<Fetched> batches([this, &runner] { return Read(runner); }, total - start);
    stopping_ = start > 0 && EvaluateOwed(metrics, start);
    while (true) {
      // Ahead of the device, but never beyond a step after which the model is read.
      while (!stopping_ && optimizer_.step() < total && runner.in_flight() < runner.Depth() &&
             (runner.in_flight() == 0 || MayRunAhead(optimizer_.step()))) {
        OrExplain(runner, optimizer_.step() + 1, [&] { Start(runner, batches); });
      }
      if (runner.in_flight() == 0) break;
      outcome.steps = OrExplain(runner, queued_.front().metrics.step,
                                [&] { return FinishStep(runner, metrics, progress); });
    }
    const bool evaluated = !heldout_ || final_heldout_;
    if (outcome.steps == total && evaluated) return true;
    progress.Line(fmt::format("stopped after step {} of {}, as asked; saved in {}. {}",
                              outcome.steps, total, outcome.paths.checkpoints().string(),
                              hooks_.resume_command.empty()
                                  ? "The same configuration continues the run."
                                  : "To continue: " + hooks_.resume_command));
    return false;
  }

  // A failure of the device is often another op's than the one that noticed it.
  template <class F>
  std::invoke_result_t<F> OrExplain(const StepRunner& runner, std::int64_t step, const F& work) {
    try {
      return work();
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kInternal) throw;
      throw Error(
          e.code(),
          Explain({.step = step,
                   .message = e.message(),
                   .last_op = profile_.last_op(),
                   .on_gpu = ctx_.device().type == DeviceType::kCuda,
                   .replayed = runner.newest_is_replay(),
                   .checkpoint = io::NewestGoodCheckpoint(RunPaths{config_.output}.checkpoints())}),
          e.where());
    }
  }

  // On any rank: the same answer on all of them, which must ask together.
  bool StopRequested() const {
    return parallel::AnyOf(mesh_.world(), hooks_.stop_requested && hooks_.stop_requested());
  }

  // The evaluation that was due at the checkpoint the run resumes from, and was cut short; true
  // when a stop was asked for.
  bool EvaluateOwed(std::optional<MetricsWriter>& metrics, std::int64_t step) {
    StepMetrics m;
    m.step = step;
    if (metrics && metrics->last() && metrics->last()->step == step) m = *metrics->last();
    // The other ranks know no more than that it is there.
    if (parallel::AnyOf(mesh_.world(), m.heldout.has_value()) && !m.heldout) m.heldout.emplace();
    EvaluateIfDue(m, metrics);
    return StopRequested();
  }

  // Adds the held-out loss to a step's metrics, unless a stop is asked for on the way.
  void EvaluateIfDue(StepMetrics& m, std::optional<MetricsWriter>& metrics) {
    const bool last = m.step == config_.train.steps;
    const bool due = config_.eval.every > 0 && m.step % config_.eval.every == 0 && !m.heldout;
    if (!heldout_ || !(last || due)) return;
    m.heldout = last ? EvaluateFinal() : EvaluateHeldout(config_.eval.tokens, {});
    if (m.heldout && metrics) metrics->AddHeldout(m);
  }

  // A step as it is read ahead.
  struct Fetched {
    StepInputs inputs;
    data::StreamState state_after;
  };
  Fetched Read(const StepRunner& runner) {
    data::GlobalBatch batch = stream_->Next();
    if (!keeps_bounds_) batch.windows = {};
    return {runner.Prepare(
                MicroBatchesOf(batch, config_.RowsPerMicroBatch(), mesh_.rank(), mesh_.size()),
                batch.totals),
            stream_->state()};
  }
  // A step that is queued.
  struct Queued {
    StepMetrics metrics;
    data::StreamState state_after;
    std::int64_t unpadded_tokens = 0;
  };

  bool SavesAfter(std::int64_t step) const {
    return (step == config_.train.steps && config_.checkpoint.at_end) ||
           (config_.checkpoint.every > 0 && step % config_.checkpoint.every == 0);
  }
  bool ReadsModelAfter(std::int64_t step) const {
    const bool evaluates = heldout_ && config_.eval.every > 0 && step % config_.eval.every == 0;
    return SavesAfter(step) || evaluates;
  }

  // Whether the step after `step` may be queued while it runs.
  bool MayRunAhead(std::int64_t step) const {
    return !ReadsModelAfter(step) && !config_.profile.Contains(step + 1);
  }

  void Start(StepRunner& runner, data::ReadAhead<Fetched>& batches) {
    const std::int64_t number = optimizer_.step() + 1;
    const bool profiled = config_.profile.Contains(number);
    if (profiled && !roofline_) roofline_ = MeasureRoofline(ctx_, ModelDType(config_.precision));
    const TraceRange range("step ", number);
    if (runner.in_flight() == 0) mark_ = Clock::now();
    if (profiled) profile_.Start();
    Fetched fetched = batches.Next();
    Queued queued;
    queued.state_after = fetched.state_after;
    queued.unpadded_tokens = fetched.inputs.totals.tokens;
    queued.metrics.step = number;
    queued.metrics.lr = LearningRate(config_.MakeSchedule(), queued.metrics.step);
    {
      const quant::Autocast autocast(recipe_, Scope(/*training=*/true));
      runner.Start(std::move(fetched.inputs), queued.metrics.lr);
    }
    scaling_.EndStep(ctx_, &amax_reducer_);
    if (profiled) profile_.End();
    queued_.push_back(std::move(queued));
  }

  // Waits for the oldest step that is queued, and does what follows it; returns its number. Where a
  // stop was asked for no more is queued, and the last one that was is saved.
  std::int64_t FinishStep(StepRunner& runner, std::optional<MetricsWriter>& metrics,
                          Progress& progress) {
    const StepResult result = runner.Finish();
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - mark_).count();
    mark_ = now;
    const Queued queued = std::move(queued_.front());
    queued_.pop_front();
    position_.stream = queued.state_after;
    StepMetrics m = queued.metrics;
    if (runner.note() != graph_note_) {
      graph_note_ = runner.note();
      progress.Line("steps: " + graph_note_);
    }
    const auto tokens = static_cast<double>(config_.batch.global_tokens);
    m.tokens_seen = m.step * config_.batch.global_tokens;
    m.loss = result.loss;
    m.aux_loss = result.aux_loss;
    m.layer_aux_loss = result.layer_aux_loss;
    m.z_loss = result.z_loss;
    m.grad_norm = result.grad_norm;
    m.step_ms = seconds * 1e3;
    m.tokens_per_s = tokens / seconds;
    m.unpadded_tokens_per_s = static_cast<double>(queued.unpadded_tokens) / seconds;
    m.flops_per_s = m.tokens_per_s * flops_per_token_;
    if (peak_flops_ > 0) {
      const double each = m.flops_per_s / mesh_.size();
      peak_flops_ = std::max(peak_flops_, each);  // a step showed that a GPU can do more
      m.mfu = each / peak_flops_;
    }
    m.memory_peak_bytes = MostOf(mesh_.world(), PeakMemory(ctx_) + ExchangeMemory(model_));
    m.redone = result.redone;
    SetExpertLoad(result.expert_counts, m);
    if (metrics) metrics->Write(m);
    // Saved before the evaluation, which may take longer than a stopping machine waits.
    const bool drained = runner.in_flight() == 0;
    stopping_ = stopping_ || StopRequested();
    const bool saved = SavesAfter(m.step) || (stopping_ && drained);
    if (saved) Save();
    EvaluateIfDue(m, metrics);
    progress.Step(m);
    if (config_.profile.Contains(m.step)) EndProfile(m, progress);
    stopping_ = stopping_ || StopRequested();
    if (stopping_ && drained && !saved) Save();
    if (hooks_.after_step) hooks_.after_step(m.step);
    return m.step;
  }

  // After a step that is told op by op; the last of them prints.
  void EndProfile(const StepMetrics& m, Progress& progress) {
    ++profiled_steps_;
    profiled_ms_ += m.step_ms;
    if (m.step != config_.profile.last) return;
    const std::string text = fmt::format(
        "mean of steps {} to {}, op by op; the time between the beginnings of two ops is the "
        "first's\n{}",
        m.step - profiled_steps_ + 1, m.step,
        profile_.Table(*roofline_, profiled_steps_, profiled_ms_));
    if (mesh_.is_first()) io::WriteFileAtomically(RunPaths{config_.output}.profile(), text);
    progress.Line(text);
  }

  // The whole held-out part; counts on the way which base each expert serves. Nothing when a stop
  // was asked for.
  std::optional<HeldoutMetrics> EvaluateFinal() {
    const bool protein = config_.data.alphabet == data::Alphabet::kProtein;
    const bool rna = config_.data.alphabet == data::Alphabet::kRna;
    if (config_.data.alphabet == data::Alphabet::kBytes) {
      return final_heldout_ = EvaluateHeldout(0, {});
    }
    ExpertBaseCounts counts(protein ? "ACDEFGHIKLMNPQRSTVWY"
                            : rna   ? "ACGU"
                                    : "ACGT",
                            config_.model.num_hidden_layers, config_.model.num_local_experts);
    final_heldout_ = EvaluateHeldout(0, [&counts](const data::Batch& batch, const Tensor& experts) {
      counts.Add(batch, experts);
    });
    if (final_heldout_) {
      counts.SumOver(*model_.statistics);
      if (mesh_.is_first()) counts.Write(RunPaths{config_.output}.expert_bases());
    }
    return final_heldout_;
  }

  std::optional<HeldoutMetrics> EvaluateHeldout(std::int64_t tokens,
                                                const RoutingObserver& observer) {
    const quant::Autocast autocast(recipe_, Scope(/*training=*/false));
    const EvaluationResult e = Evaluate(
        model_.model, *heldout_, config_.data.seq_len, tokens, config_.EvaluationTokens(), observer,
        [this] { return StopRequested(); }, &mesh_.world());
    if (!e.complete) return std::nullopt;
    return HeldoutMetrics{e.Loss(), e.BitsPerBase(), e.bases};
  }

  static IdleExperts IdleAtTheEnd(const RunPaths& paths) {
    std::vector<ExpertLoad> loads;
    for (StepMetrics& m : ReadMetrics(paths.metrics())) loads.push_back(std::move(m.expert_load));
    return CountIdleExperts(loads);
  }

  void Save() {
    CheckWeights();
    const TrainingSnapshot snapshot =
        TakeSnapshot(model_, optimizer_, scaling_, position_, config_);
    const bool more_steps = !stopping_ && optimizer_.step() < config_.train.steps;
    if (config_.checkpoint.background && more_steps) {
      saver_->SaveLater(snapshot.Copy());
    } else {
      saver_->Save(snapshot);
    }
  }

  void CheckWeights() {
    parallel::FromAll(mesh_.world(), [&] {
      CheckFiniteWeights(model_.store, optimizer_.step());
      return std::string();
    });
  }

  std::FILE* Out() const { return mesh_.is_first() ? hooks_.out : quiet_.get(); }

  // After the last checkpoint; a run that is killed in here does it again when it is resumed.
  void Finish(TrainOutcome& outcome) {
    CheckWeights();
    const std::uint64_t checksum = WeightsChecksum(optimizer_, mesh_.world());
    outcome.finished = true;
    outcome.heldout = final_heldout_;
    parallel::FromFirst(mesh_.world(), [&] {
      WriteResults(outcome, checksum);
      return std::string();
    });
  }

  void WriteResults(TrainOutcome& outcome, std::uint64_t checksum) {
    const RunPaths& paths = outcome.paths;
    RunSummary summary;
    summary.heldout = final_heldout_;
    summary.weights_checksum = fmt::format("{:016x}", checksum);
    if (!config_.checkpoint.at_end) {
      Print("the model is not kept (checkpoint.at_end=false)");
    } else if (const auto lacking = model::OptionsThatMixtralLacks(config_.model);
               lacking.empty()) {
      WriteFinalModel(paths);
    } else {
      Print(
          fmt::format("no Hugging Face directory is written, since Mixtral has no {}; the last "
                      "checkpoint is the model",
                      fmt::join(lacking, ", no ")));
    }
    summary.steps = outcome.steps;
    summary.tokens = outcome.steps * config_.batch.global_tokens;
    summary.parameters = model::ParameterCount(config_.model);
    summary.active_parameters = model::ActiveParameterCount(config_.model);
    for (const StepMetrics& m : ReadMetrics(paths.metrics())) {
      summary.train_seconds += m.step_ms / 1e3;
    }
    outcome.idle_experts = IdleAtTheEnd(paths);
    WriteSummary(paths.results(), summary);
  }

  // Of several ranks none has all experts: they are in the last checkpoint, from where they are
  // written a tensor at a time.
  void WriteFinalModel(const RunPaths& paths) {
    const model::ExportOptions options{.dtype = ModelDType(config_.precision), .overwrite = true};
    if (mesh_.size() == 1) {
      return model::SaveHuggingFace(paths.final_model(), model_.model.config(),
                                    ExportWeights(model_.store), options);
    }
    // The last one itself, read once: what is damaged is an error, an older one another model.
    const std::vector<fs::path> saved = io::ListCheckpoints(paths.checkpoints());
    CISTRON_INVARIANT(!saved.empty(), "{}: the last checkpoint is gone",
                      paths.checkpoints().string());
    ExportCheckpoint(saved.back(), paths.final_model(), options);
  }

  RunConfig config_;
  TrainHooks hooks_;
  const parallel::Mesh& mesh_;
  // Where the other ranks print.
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> quiet_{std::fopen("/dev/null", "w"),
                                                         &std::fclose};
  Profile profile_;
  ExchangesInProfile exchanges_;
  ops::Context ctx_;  // before the data is read: the machine may refuse
  std::shared_ptr<const data::Corpus> corpus_;
  model::LocalMixtral model_;
  optim::AdamWOptimizer optimizer_;
  quant::Recipe recipe_ = MakeRecipe(config_.precision, config_.recipe);
  quant::ScalingStates scaling_;
  parallel::MeshAmaxReducer amax_reducer_{mesh_};
  std::string_view unit_ = data::UnitName(config_.data.alphabet);
  std::unique_ptr<data::TrainingStream> stream_;
  bool keeps_bounds_ = KeepsSequenceBounds(ctx_, config_, stream_->window_lengths());
  std::unique_ptr<data::EvaluationStream> heldout_;
  std::optional<RunDirectory> directory_;  // of the first rank
  std::optional<CheckpointSaver> saver_;
  DataPosition position_;
  std::optional<HeldoutMetrics> final_heldout_;
  double flops_per_token_ = 0, peak_flops_ = 0;
  std::optional<Roofline> roofline_;
  std::int64_t profiled_steps_ = 0;
  double profiled_ms_ = 0;
  std::deque<Queued> queued_;
  bool stopping_ = false;     // no more steps are queued
  Clock::time_point mark_{};  // when the step that finishes next began, or the one before it ended
  std::string graph_note_;
};

}  // namespace

TrainOutcome Train(const LoadedConfig& loaded, const TrainHooks& hooks, comm::Communicator* ranks) {
  if (ranks == nullptr) {
    const auto alone = comm::MakeSelf();
    return Train(loaded, hooks, alone.get());
  }
  const RunConfig& config = loaded.config;
  Device device = config.ComputeDevice();
  std::unique_ptr<comm::Communicator> gpus;
  std::optional<parallel::Mesh> mesh;
  std::optional<Trainer> trainer;
  try {
    parallel::FromAll(*ranks, [&] {
      CheckRunConfig(loaded);
      return std::string();
    });
    CheckAlike(loaded, hooks.program, *ranks);
    const std::int64_t dp = config.parallel.dp, ep = config.parallel.ep;
    parallel::FromAll(*ranks, [&] {
      parallel::Mesh::Check(ranks->size(), dp, ep, config.model.num_local_experts);
      return std::string();
    });
    if (device.type == DeviceType::kCuda && ranks->size() > 1) {
      gpus = ConnectDevices(*ranks, device, std::chrono::seconds(config.parallel.timeout));
      ranks = gpus.get();
    }
    mesh.emplace(*ranks, dp, ep, config.model.num_local_experts);
    const std::int64_t here = device.type == DeviceType::kCuda ? 1 : RanksHere(*ranks);
    const std::vector<std::string> data = parallel::FromAll(*ranks, [&] {
      if (config.threads > 0 && ranks->size() == 1) SetNumThreads(static_cast<int>(config.threads));
      CheckMemory(MemoryProblemOf(config), here, ranks->rank() == 0);
      trainer.emplace(loaded, hooks, *mesh, device);
      return fmt::format("{:016x}", trainer->fingerprint());
    });
    CheckSameData(data);
    trainer->Open(loaded);
    return trainer->Run();
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kOutOfMemory) throw;
    throw WithMemoryAdvice(e, MemoryProblemOf(loaded.config));
  }
}

}  // namespace cistron::train
