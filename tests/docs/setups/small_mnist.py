from shoal.programs.tasks import TASKS

mnist = TASKS.make("mnist").data()
x, y, test_x, test_y = mnist.x[:200], mnist.y[:200], mnist.test_x[:200], mnist.test_y[:200]
