"""Progress counts steps and samples, and saves itself."""

from shoal.engine.progress import Progress


def test_samples_are_unmerged_until_they_are_taken():
    progress = Progress(2)
    progress.count_gradient(3)
    progress.count_gradient(4)
    assert (progress.clock, progress.unmerged, progress.samples) == (2, 7, 7)
    assert (progress.take_unmerged(), progress.unmerged, progress.samples) == (7, 0, 7)


def test_when_all_parts_are_merged_so_is_every_sample():
    progress = Progress(2)
    for part in (3, 3, 4):
        progress.merge_part(7.0, part, 10)
    assert progress.merged == 7.0


def test_a_loaded_state_goes_on():
    one, other = Progress(2), Progress(2)
    one.count_gradient(5)
    one.finish_step()
    one.advance(5.0)
    other.load(one.state())
    assert other.state() == one.state()
    assert (other.t, other.version, other.merged, other.samples_before) == (1, 1, 5.0, 5)


def test_what_a_worker_took_before_it_was_away_was_not_taken_before_the_run():
    back, other = Progress(2), Progress(2)
    back.count_gradient(5)
    other.count_gradient(7)
    other.finish_step()
    back.begin_at(1, other.state())
    assert (back.t, back.samples, back.samples_before, back.unmerged) == (1, 5, 0, 0.0)


def test_who_left_may_come_back():
    progress = Progress(3)
    progress.note_departure(1, died=True)
    assert [rank for rank in range(4) if progress.works(rank)] == [0, 2]
    progress.note_return(1, incarnation=1)
    assert [rank for rank in range(4) if progress.works(rank)] == [0, 1, 2]


def test_deaths_are_counted_once_whether_the_loss_or_the_return_was_heard_of():
    progress = Progress(3)
    progress.note_departure(1, died=True)
    progress.note_return(1, incarnation=1)
    assert progress.deaths == 1
    progress.note_return(1, incarnation=3)  # it died twice more, and nobody told
    progress.note_departure(2, died=False)
    progress.note_departure(3, died=True)  # a server
    assert progress.deaths == 3
